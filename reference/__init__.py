"""The single-process truth: meshes, layouts, recipes and the expected values of every subject.

Imports torch and numpy only. Nothing here runs on more than one process, and nothing here shares code with
an implementation under test.
"""
