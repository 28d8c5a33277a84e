"""Classical Laplace for classes by laplace-torch: last layer, Kronecker factors, the prior by
the evidence, the probit link.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ssla_paper.peers import library
from ssla_paper.peers.laplace import INSTALL


def laplace_classes(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    subset: str = "last_layer",
    structure: str = "kron",
    precision: float | None = None,
    link: str = "probit",
) -> Callable[[Tensor], Tensor]:
    """Fitted to x (n, d), y (n,) -> a function from new inputs (N, d) to probabilities (N, C).

    precision None: of the highest evidence, by the library's own search. link: "probit" or
    "bridge".
    """
    peer = library("laplace", INSTALL)
    loader: torch.utils.data.DataLoader[tuple[Tensor, ...]] = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x.double(), y.long()), batch_size=512
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la = peer.Laplace(
            copy.deepcopy(model).double().eval(),
            "classification",
            subset_of_weights=subset,
            hessian_structure=structure,
        )
        la.fit(loader)
        if precision is None:
            la.optimize_prior_precision(method="marglik")
        else:
            la.prior_precision = torch.tensor([precision], dtype=torch.float64)

    def predict(new: Tensor) -> Tensor:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            probs: Tensor = la(new.double(), pred_type="glm", link_approx=link)
        return probs.detach().double()

    return predict
