"""What every room uses: errors and their codes, arguments, locations, storages, untrusted files, and crash safety."""
