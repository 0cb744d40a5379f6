"""What commands share: options, output, folders, and facts about models and devices."""
