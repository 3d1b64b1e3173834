"""Learners that are disturbed for hours, and have to end in the same bits as those that were left alone."""
