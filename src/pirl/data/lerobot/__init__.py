"""The LeRobot dataset format: read with suspicion, written with care."""
