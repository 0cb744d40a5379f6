"""Typed, frozen settings. A wrong one fails when it is read, with a line that says what to do."""
