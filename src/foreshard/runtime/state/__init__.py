"""What a rank holds and what moves: parameters, slices, buckets, optimizer shards, migration."""
