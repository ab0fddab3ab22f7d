"""Fixtures of the Pipeline page."""

from tests.pipeline.driver import pipeline_worker, visit  # noqa: F401
from tests.ui.conftest import installed_once  # noqa: F401
