"""How a wheel is built: setuptools runs it, by pyproject.toml, and nothing of dsx imports it.

Recipes, configs, guides and the tested versions are worked on beside the package. A wheel has them inside of
it, in ``dsx/shipped``, where :func:`dsx.config.document.shipped` finds them wherever the package lies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from setuptools.command.build_py import build_py

SHIPPED: Final = (
    "constraints.txt",
    "recipes/*.py",
    "configs/*.json",
    "docs/guides/*.md",
    "docs/guides/pictures/*",
)


class BuildWithShipped(build_py):
    """Copies the package, and what it ships into it; an editable installation reads it where it lies."""

    def run(self) -> None:
        super().run()
        for name in [] if self.editable_mode else _shipped():
            copy = Path(self.build_lib, "dsx", "shipped", name)
            self.mkpath(str(copy.parent))
            self.copy_file(name, str(copy))

    def get_source_files(self) -> list[str]:
        """Also for a source distribution, from which the wheel can then be built."""
        return [*super().get_source_files(), *_shipped()]


def _shipped() -> list[str]:
    """Paths below the project's folder, in which a build runs."""
    return sorted(str(path) for pattern in SHIPPED for path in Path().glob(pattern) if path.is_file())
