"""Shell completion: candidates for a word, and the scripts of the shells.

The shells' scripts and kubectl call `elasticjob __complete WORD... INCOMPLETE` and read a candidate
with a tab and its description from each line, then `:4` if files are no candidates, else `:0`. That
is the protocol of kubectl's own completion.
"""
