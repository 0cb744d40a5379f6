"""Typed, frozen settings. A mistake fails when it is read, with one line that says what to do."""
