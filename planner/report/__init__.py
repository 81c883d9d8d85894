"""The report about a plan: one HTML page with pictures, made from the plan alone.

Each file is a view: a pure function from data to markup; `page` joins them. The report decides and prices nothing, and
escapes all text of a plan, a cluster or a record.
"""
