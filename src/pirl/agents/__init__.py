"""The learners: BC, ACRLPD and RIPT, one file each."""
