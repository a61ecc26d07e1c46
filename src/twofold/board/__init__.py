"""The page that watches runs comes here; nothing yet."""
