"""A worker: carries out jobs with a model, a trainer or rewards."""
