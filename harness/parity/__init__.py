"""Did a strategy train the same thing as the reference run?"""
