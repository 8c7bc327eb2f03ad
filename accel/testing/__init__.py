"""What tests and benchmarks share, shipped so that code built on accel can use it too.

`tolerance` derives error bounds, `bench` runs and reports benchmarks. Nothing here is imported by the ops.
"""
