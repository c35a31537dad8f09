"""Modules that tests share. No test imports another test."""
