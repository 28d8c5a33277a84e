"""The public path of the BoTorch adapter, which is in `ssla.integrations.botorch`."""

from ssla.integrations.botorch import SSLAModel, train

__all__ = ["SSLAModel", "train"]
