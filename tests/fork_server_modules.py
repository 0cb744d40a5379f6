"""Loaded once by the fork server of the tests, for the processes of all tests: what they would import or build."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("clip")  # compiles patterns for all models, as every process with encoders would
