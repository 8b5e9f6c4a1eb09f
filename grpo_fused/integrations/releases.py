"""The releases of other packages that the integrations know."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

ANY_RELEASE = "GRPO_FUSED_ANY_RELEASE"
"""Environment variable: 1 to try releases that are not known."""


def installed_release(package: str) -> tuple[int, int]:
    """(major, minor) of an installed package; (0, 0) if it is not, which `check_release` says."""
    try:
        installed = Version(version(package))
        return installed.major, installed.minor
    except PackageNotFoundError:
        return 0, 0


def check_release(package: str, known: Collection[str], *, optional: bool = False) -> None:
    """Raise `ImportError` unless the installed release of a package is known; warn instead if `ANY_RELEASE` is set.

    Args:
        package: Its name on the package index.
        known: Such as "1.16", with all patch releases; a range, if there are many, in their order.
        optional: Whether it may be absent.
    """
    names = ", ".join(f"{release}.*" for release in known)
    if len(known) > 3:
        names = f"{min(known, key=_numbers)} to {max(known, key=_numbers)}"
    try:
        installed = version(package)
    except PackageNotFoundError:
        if optional:
            return
        raise ImportError(f"grpo_fused needs {package} {names} for this; it is not installed") from None
    if ".".join(installed.split(".")[:2]) in known:
        return
    told = f"grpo_fused knows {package} {names}; found {package} {installed}"
    if os.environ.get(ANY_RELEASE) != "1":
        raise ImportError(f"{told}. To try it all the same: {ANY_RELEASE}=1 in the environment (docs/versions.md)")
    warnings.warn(f"{told}, which has not been tested; {ANY_RELEASE}=1 lets it run", stacklevel=3)


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))
