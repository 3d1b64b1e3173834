"""The LeRobot dataset formats v2.0, v2.1 and v3.0: reader and writer."""
