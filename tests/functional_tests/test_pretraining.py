"""Trains each case for a few iterations and compares its losses with the golden ones.

    python tests/functional_tests/test_pretraining.py       rewrites the golden values

Golden values hold to 1e-4: another processor's kernels sum in another order. Within one machine
comparisons are exact; test_parity.py and test_checkpoints.py make them.
"""

import json
import tempfile
from pathlib import Path

import pytest

from tests.functional_tests import cases

NAMES = sorted(file.parent.name for file in cases.HERE.glob("*/model_config.yaml"))
TAGS = {"dsa": ["lm loss", "indexer loss"], "mtp_pp2": ["lm loss", "mtp_1 loss"]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretraining")
    print(cases.run({name: cases.arguments(name) for name in NAMES}, folder))
    return folder


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.timeout(900)
def test_losses_are_golden(trained, name):
    golden = json.loads((cases.HERE / name / "golden_values.json").read_text())
    assert golden.keys() == set(_tags(name))
    for tag, values in golden.items():
        assert cases.losses(trained, name, tag) == pytest.approx(values, rel=1e-4), tag


def _tags(name: str) -> list[str]:
    return TAGS.get(name, ["lm loss"])


def _rewrite() -> None:
    with tempfile.TemporaryDirectory() as folder:
        print(cases.run({name: cases.arguments(name) for name in NAMES}, Path(folder)))
        for name in NAMES:
            values = {tag: cases.losses(Path(folder), name, tag) for tag in _tags(name)}
            text = json.dumps({tag: [float(f"{v:.7g}") for v in vs] for tag, vs in values.items()})
            (cases.HERE / name / "golden_values.json").write_text(text + "\n")


if __name__ == "__main__":
    _rewrite()
