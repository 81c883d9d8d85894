"""The report about a plan: one page of HTML with its pictures, made of what the plan says and of nothing else.

One file a view, each a pure function from data to markup; `page` puts them together. Nothing here decides or prices
anything, and no text of a plan, a cluster or a record reaches the page unescaped.
"""
