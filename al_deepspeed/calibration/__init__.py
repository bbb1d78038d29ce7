"""Calibration: what a micro-batch of (B, S) costs and fills, measured in the live engine and fitted.

`file.read_calibration` reads what `al-deepspeed calibrate` wrote. The scan in launched.py is what
`deepspeed --module al_deepspeed.calibration` runs; fits, choices and the file need no process group.
"""
