"""The releases of other packages that the integrations know."""

from __future__ import annotations

from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version


def check_release(package: str, known: Collection[str], *, optional: bool = False) -> None:
    """Raise `ImportError` unless the installed release of a package is known.

    Args:
        package: Its name on the package index.
        known: Such as "1.16", with all patch releases.
        optional: Whether it may be absent.
    """
    names = ", ".join(f"{release}.*" for release in known)
    try:
        installed = version(package)
    except PackageNotFoundError:
        if optional:
            return
        raise ImportError(f"grpo_fused needs {package} {names} for this; it is not installed") from None
    if ".".join(installed.split(".")[:2]) not in known:
        raise ImportError(f"grpo_fused knows {package} {names}; found {package} {installed}")
