"""Names of models and data sets on the Hugging Face Hub, asked for once before a library loads them."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.file_download import repo_folder_name

TIMEOUT = 3.0
"""Seconds for the Hub's answer. transformers and datasets repeat a request that fails, for up to a minute."""


def check_name(name: str, repo_type: str = "model") -> None:
    """Raises unless a place is a folder here, is in the cache, or is a name that the Hub has.

    Args:
        name: A path, or the name of a repository.
        repo_type: "model" or "dataset".

    Raises:
        OSError: There is neither a folder nor a repository of this name, or the Hub cannot be reached.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return
    here = f"there is no folder {name!r}" + ("" if folder.is_absolute() else f" in {Path.cwd()}")
    try:
        cached = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type=repo_type)
        if cached.exists() or constants.HF_HUB_OFFLINE:
            return
        HfApi().repo_info(name, repo_type=repo_type, timeout=TIMEOUT)
    except HFValidationError as error:
        raise OSError(f"{here}, and it is not a name of the Hugging Face Hub") from error
    except HfHubHTTPError as error:
        status = f"HTTP {error.response.status_code}" if error.response is not None else type(error).__name__
        raise OSError(
            f"{here}, and the Hugging Face Hub has no {repo_type} of this name that you may read ({status})"
        ) from error
    except Exception as error:  # of the HTTP library, which differs between releases
        raise OSError(
            f"{here}, and the Hugging Face Hub cannot be reached ({type(error).__name__}: {error})"
        ) from error
