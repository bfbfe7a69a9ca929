"""Judging of operators that draw random numbers, by statistics of many draws."""
