"""`pirl report`: one page about runs, without any server."""
