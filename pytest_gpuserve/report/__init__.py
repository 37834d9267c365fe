"""What a run leaves behind: its folder and records (`store`), and the reports rendered from a record.

Renderers are pure: a record in, text out. The record alone is the truth, so a report can be made again later.
"""
