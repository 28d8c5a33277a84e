"""Table 2 and the figure of bands, by the procedures that produced them and by correct
computation.
"""

from ssla_paper.heteroscedastic.study import Heteroscedastic

__all__ = ["Heteroscedastic"]
