"""The production scheduler on a virtual clock.

`simulator.simulate` runs a SPEC and reports everything; `makespan.predict_makespan` returns its makespan alone,
fast enough for a search; `prediction.predict` continues a live run from its measured costs; and
`single_device.predict_single_device` predicts a step on the device of a profile.
"""
