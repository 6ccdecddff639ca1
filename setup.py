"""Builds the wheel so that it leaves megatron-core's files alone.

The layers lie at upstream's own paths, megatron/core and megatron/training, which on an installed
system belong to the megatron-core distribution. The wheel carries them as
megatron/overlay/layers/core and megatron/overlay/layers/training, where the loader looks first. A
clone and an editable install have no such folder, and use the tree as it is.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
LAYER_TREES = ("core", "training")
INSIDE_WHEEL = Path("megatron", "overlay", "layers")


def layer_files() -> list[Path]:
    """Every file of the layer trees, relative to the folder megatron."""
    return sorted(
        path.relative_to(HERE / "megatron")
        for tree in LAYER_TREES
        for path in (HERE / "megatron" / tree).rglob("*.py")
    )


class BuildWithLayers(build_py):
    """build_py, and the layer trees beside the loader."""

    def run(self) -> None:
        super().run()
        # A build folder outlives its build: a layer deleted since must not come back from it.
        shutil.rmtree(Path(self.build_lib, INSIDE_WHEEL), ignore_errors=True)
        for path in layer_files():
            target = Path(self.build_lib, INSIDE_WHEEL, path)
            self.mkpath(str(target.parent))
            self.copy_file(str(HERE / "megatron" / path), str(target))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """What the build writes, the layers included."""
        layers = [str(Path(self.build_lib, INSIDE_WHEEL, path)) for path in layer_files()]
        return super().get_outputs(include_bytecode) + layers

    def get_source_files(self) -> list[str]:
        """What an sdist needs, the layers included (relative to the repository's root)."""
        return super().get_source_files() + [str(Path("megatron", path)) for path in layer_files()]


setup(cmdclass={"build_py": BuildWithLayers})
