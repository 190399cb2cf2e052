"""The tokenizer service of Reprise."""
