"""Which version of the package this is."""

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    try:
        return version("mambalign")
    except PackageNotFoundError:  # run from a folder that was never installed
        return "unknown"
