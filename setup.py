"""The packages of the wheel. The app and the sample models stay at the top level and go inside `explorer`."""

import re
from pathlib import Path

from setuptools import find_packages, setup

PROJECT = "https://example.org/checkpoint-explorer"
"""A release fills in where the project is published, see .github/workflows/release.yml."""
README = Path("README.md").read_text(encoding="utf-8")
README = re.sub(r"(\]\()(?!https?:|#)", rf"\g<1>{PROJECT}/blob/main/", README)
README = re.sub(r"(src(?:set)?=\")(?!https?:)", rf"\g<1>{PROJECT}/raw/main/", README)

setup(
    packages=[*find_packages(include=["explorer*"]), "explorer.page", "explorer.sample_models"],
    package_dir={"explorer.page": ".", "explorer.sample_models": "sample_models"},
    long_description=README,
    long_description_content_type="text/markdown",
    script_name="setup.py",  # which is then no module of explorer.page
)
