"""Hypothesis measures no times here: on a busy machine they say nothing."""

from __future__ import annotations

import hypothesis

hypothesis.settings.register_profile("elasticgang", deadline=None)
hypothesis.settings.load_profile("elasticgang")
