"""Reference applications of stacked_remat; they run from a checkout and are not part of
the wheel.
"""
