"""Judging on a Ray cluster: shipping, placement, the code on a node, and the handling of losses."""
