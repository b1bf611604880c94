# SPDX-License-Identifier: Apache-2.0
"""docker/Dockerfile fits the repository. Nothing here builds it."""

import re
from pathlib import Path

import pytest
from commands import CommandError, check, split
from documents import ROOT

from tools.series.manifest import load

DOCKERFILE = ROOT / "docker/Dockerfile"
TEXT = re.sub(r"\\\n\s*", " ", DOCKERFILE.read_text())


def instructions(name: str) -> list[str]:
    return re.findall(rf"^{name} (.*)$", TEXT, re.M)


def test_the_image_is_of_the_release_that_is_patched():
    version = load(ROOT).bases[0]
    images = {line.split()[0] for line in instructions("FROM")}
    assert images == {f"vllm/vllm-openai:v{version}"}
    assert f"FROM vllm/vllm-openai:v{version}" in (ROOT / "docs/docker.md").read_text()


def test_what_is_copied_is_there_and_is_all_that_a_wheel_needs():
    sources = [word for line in instructions("COPY") for word in line.split()[:-1]]
    assert all((ROOT / source).exists() for source in sources)
    owned = {Path(path).parts[0] for p in load(ROOT).patches for path in p.new_files}
    assert owned | {"series", "tools", "pyproject.toml"} <= set(sources)


@pytest.mark.parametrize("line", instructions("RUN"))
def test_commands_would_run(line):
    text = re.sub(r"--mount=\S+\s+|/build/bin/", "", line)
    text = re.sub(r'^PATH="[^"]*"\s+', "", text)
    for words in split(text):
        if words[0] != "apt-get":
            check(words)


def test_a_misspelt_option_would_be_found():
    with pytest.raises(CommandError):
        check(split("python3 -m tools.series wheel --output /dist")[0])
