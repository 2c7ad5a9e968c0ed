"""What layers read: statistics, calibration files, and scales per input channel."""
