# SPDX-License-Identifier: Apache-2.0
"""The models that can be rehearsed without a folder of one's own."""

from pathlib import Path

MODELS = Path(__file__).with_name("models")


class ModelError(ValueError):
    """There is nothing to rehearse under that name."""


def built_in_models() -> list[str]:
    """Names that stand for a shape in models/."""
    return sorted(path.stem for path in MODELS.glob("*.json"))


def model_folder(model: str, scratch: Path) -> Path:
    """The folder with the config.json of `model`.

    `model` is a folder, its config.json, or a built-in name, for which one is
    written under `scratch`. Only the shapes count: weights are dummies in either case.
    """
    built_in = MODELS / f"{model}.json"
    if built_in.is_file():
        folder = scratch / model
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(built_in.read_text())
        return folder
    folder = Path(model)
    if folder.name == "config.json" and folder.is_file():
        folder = folder.parent
    if (folder / "config.json").is_file():
        return folder.resolve()
    raise ModelError(
        f"{model!r} is neither a folder with a config.json nor one of "
        f"{', '.join(built_in_models())}; for a model of the hub, put its config.json "
        "into a folder and name that"
    )
