"""What several tests share: worker processes, memory patterns and markers."""
