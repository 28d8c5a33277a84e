"""The public path of the MLflow adapter, which is in `ssla.integrations.mlflow`."""

from ssla.integrations.mlflow import Model, log_model, save_model

__all__ = ["Model", "log_model", "save_model"]
