package broken

// attachments are the mutations of attach and detach.
var attachments = []Mutation{
	{
		Name: "A33-refuses-again", Rule: "A33",
		Says: "a disk that is attached to an instance is not attached to it again",
		Before: func(x *Exchange) {
			if x.Is("instance_disk_attach") && x.disk().State.State == "attached" {
				x.Refuse(400, "InvalidRequest", "cannot attach disk: disk is already attached")
			}
		},
	},
	{
		Name: "A36-refuses-again", Rule: "A36", Says: "a detached disk is not detached again",
		Before: func(x *Exchange) {
			if x.Is("instance_disk_detach") && x.disk().State.State == "detached" {
				x.Refuse(400, "InvalidRequest", "cannot detach disk: disk is not attached")
			}
		},
	},
}
