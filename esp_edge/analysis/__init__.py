"""What happens inside the target model while it is probed."""
