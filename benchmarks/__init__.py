"""One file per op or feature; `python -m accel bench NAME` runs `benchmarks/NAME.py`."""
