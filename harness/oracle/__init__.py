"""When do two results agree?"""
