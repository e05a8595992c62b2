"""Data: rows from files, prompts as tokens, and the stream of prompt batches that a run draws from.

files       parquet, jsonl, folders, hub datasets and generators -> rows
columns     rows -> prompt, ground truth, source (verl's schema, or flat columns)
template    prompt -> the text that the policy reads
encoder     text -> tokens
vocabulary  what a tokenizer without an unknown token cannot encode
length      the limit, and how a prompt above it is cut
table       all prompts of one source, compact
order       which row comes next: shuffled, mixed, resumable
prompts     the stream of prompt batches; held-out prompts
examples    prompts with their responses, for supervised training
problems    faults of the data, several at once
"""
