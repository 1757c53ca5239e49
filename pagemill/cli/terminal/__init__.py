"""What commands read and print: the types of their options, and how they show what they found."""
