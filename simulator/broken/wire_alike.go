package broken

// wireAlike are the mutations that make two answers about the same object differ.
var wireAlike = []Mutation{
	{
		Name: "A72-view-by-name", Says: "a disk that is read by name has no path of its device",
		After: func(x *Interception) {
			if x.Is("disk_view") && !isID(x.Path.Get("disk")) {
				x.Edit(func(disk map[string]any) { disk["device_path"] = "" })
			}
		},
	},
}
