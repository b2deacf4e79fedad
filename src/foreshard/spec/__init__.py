"""The nouns as frozen dataclasses, the parsers of untrusted files, the rules that join them."""
