"""The releases of other packages that the integrations know."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

ANY_RELEASE = "GRPO_FUSED_ANY_RELEASE"
"""Environment variable: 1 to try releases that are not known."""


def check_release(
    package: str, known: Collection[str], *, optional: bool = False, stacklevel: int = 3
) -> tuple[int, int]:
    """(major, minor) of an installed package, if it is known; else an error, or a warning if `ANY_RELEASE` is set.

    Args:
        package: Its name on the package index.
        known: Such as "1.16", with all patch releases; a range, if there are many, in their order.
        optional: Whether it may be absent; then its release is (0, 0).
        stacklevel: Frames up to the line that imports the integration or patches the package, which a warning names.

    Raises:
        ImportError: It is absent, or another release.
    """
    names = ", ".join(f"{release}.*" for release in known)
    if len(known) > 3:
        names = f"{min(known, key=Version)} to {max(known, key=Version)}"
    try:
        installed = Version(version(package))
    except PackageNotFoundError:
        if optional:
            return 0, 0
        raise ImportError(f"grpo_fused needs {package} {names} for this; it is not installed") from None
    if f"{installed.major}.{installed.minor}" not in known:
        told = f"grpo_fused knows {package} {names}; found {package} {installed}"
        if os.environ.get(ANY_RELEASE) != "1":
            raise ImportError(f"{told}. To try it all the same: {ANY_RELEASE}=1 in the environment (docs/versions.md)")
        warnings.warn(f"{told}, which has not been tested; {ANY_RELEASE}=1 lets it run", stacklevel=stacklevel)
    return installed.major, installed.minor
