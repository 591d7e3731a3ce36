"""Models as the deployment commands name them."""

from __future__ import annotations

from llms.verify.contract.models import DeploymentError, ModelFolder, find_model
from llms.verify.contract.models import all_models as all_models
from npu_deploy.errors import USAGE, DeployError


def find(model: str) -> ModelFolder:
    """A model by path or by name. Raises DeployError listing the known ones."""
    try:
        return find_model(model)
    except DeploymentError as error:
        raise DeployError(str(error), USAGE) from error
