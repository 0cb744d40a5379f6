"""Help decisions (TAG): rules, forecasts and the search (BTS). Pure, like the rest of scheduling."""
